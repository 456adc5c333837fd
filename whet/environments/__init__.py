# SPDX-License-Identifier: Apache-2.0
"""Environments: they reply to the model between its turns."""
