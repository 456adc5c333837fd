# SPDX-License-Identifier: Apache-2.0
"""The process kit: children that are forked on demand, their messages, deadlines and end. It loads no torch."""
