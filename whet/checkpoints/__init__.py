# SPDX-License-Identifier: Apache-2.0
"""What a run leaves to go on from: checkpoints, and models that are made of them."""
