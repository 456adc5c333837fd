# SPDX-License-Identifier: Apache-2.0
"""Kernels in C++, Triton and torch. Each has a reference implementation in plain torch."""
