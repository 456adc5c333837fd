# SPDX-License-Identifier: Apache-2.0
"""`python -m whet` is `whet`."""

from whet.cli.app import main

if __name__ == "__main__":
    main()
