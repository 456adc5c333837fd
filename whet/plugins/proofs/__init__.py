# SPDX-License-Identifier: Apache-2.0
"""Certificates: the exact expected gradient of an algorithm."""
