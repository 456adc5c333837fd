# SPDX-License-Identifier: Apache-2.0
"""Environments: they answer the model between its turns."""
