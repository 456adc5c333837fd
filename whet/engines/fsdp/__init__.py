# SPDX-License-Identifier: Apache-2.0
"""Training with weights, gradients and optimizer state sharded over ranks, by torch's FSDP2."""
