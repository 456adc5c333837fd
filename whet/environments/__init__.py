# SPDX-License-Identifier: Apache-2.0
"""Environments answer the model between its turns."""
