# SPDX-License-Identifier: Apache-2.0
"""The command line: one file for each command (trainers' commands are in train.py), and `app`, which registers them.

Slow imports happen inside the commands."""
