# SPDX-License-Identifier: Apache-2.0
"""Untrusted programs, with limits, and without network, files or other processes to see.

protocol  `Job`, `Limits`, `Ran`, the contract of a sandbox, and `open_sandbox`
local     on this machine: bubblewrap, or Landlock and limits alone, which must be asked for
http      a service with SandboxFusion's interface
inside    the code that runs inside, of which nothing imports whet
"""
