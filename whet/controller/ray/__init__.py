# SPDX-License-Identifier: Apache-2.0
"""Workers as Ray actors, on one machine or many. Nothing else in whet imports Ray."""
