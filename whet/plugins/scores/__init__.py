# SPDX-License-Identifier: Apache-2.0
"""Score functions of code, instructions, pictures, short answers and judges, and a check of any score function."""
