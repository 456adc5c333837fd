# SPDX-License-Identifier: Apache-2.0
"""Environments reply to the model between its turns, and reward its turns."""
