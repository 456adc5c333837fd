# SPDX-License-Identifier: Apache-2.0
"""Training engines: they hold the weights and optimizer of a model, and update them."""
