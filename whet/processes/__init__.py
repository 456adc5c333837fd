# SPDX-License-Identifier: Apache-2.0
"""Child processes that are forked on demand: their messages, deadlines and end. It does not import torch."""
