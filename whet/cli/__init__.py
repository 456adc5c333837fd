# SPDX-License-Identifier: Apache-2.0
"""The command line: a file for each command (`sft` is beside `train`), and `app` that puts them together.

Modules that take long to import are imported when a command runs."""
