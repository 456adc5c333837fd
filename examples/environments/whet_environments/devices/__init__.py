# SPDX-License-Identifier: Apache-2.0
"""Games on the screen of a device: a server that speaks ADB."""
