# SPDX-License-Identifier: Apache-2.0
"""Runs `python -m whet` as `whet`."""

from whet.cli.app import main

if __name__ == "__main__":
    main()
