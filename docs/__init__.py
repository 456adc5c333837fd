# SPDX-License-Identifier: Apache-2.0
"""The pages, and in `generate` what writes those that are made from code. No part of the wheel."""
