# SPDX-License-Identifier: Apache-2.0
"""The command line: one file a command, and `app` that puts them together. What is heavy is imported when it runs."""
