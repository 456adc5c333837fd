# SPDX-License-Identifier: Apache-2.0
"""Environments, which answer the model between its turns."""
