# SPDX-License-Identifier: Apache-2.0
"""Weight sync: sends a version of the weights from the training ranks to the sampling ranks."""
