# SPDX-License-Identifier: Apache-2.0
"""Teachers of `whet distill` behind servers, and with other vocabularies than their students."""
