# SPDX-License-Identifier: Apache-2.0
"""`whet serve --tinker`: a server for the `tinker` SDK. Nothing else of whet imports this folder."""
