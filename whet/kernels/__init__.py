# SPDX-License-Identifier: Apache-2.0
"""Computation that a profiler sees: kernels in C++, Triton and torch, each with a reference in plain torch."""
