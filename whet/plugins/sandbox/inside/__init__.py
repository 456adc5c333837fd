# SPDX-License-Identifier: Apache-2.0
"""The code that runs in the sandbox."""
