# SPDX-License-Identifier: Apache-2.0
"""What answers the model between its turns."""
