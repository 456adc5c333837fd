# SPDX-License-Identifier: Apache-2.0
"""What a run needs, before it starts."""
