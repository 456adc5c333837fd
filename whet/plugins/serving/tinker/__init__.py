# SPDX-License-Identifier: Apache-2.0
"""`whet serve --tinker`: a server for the `tinker` SDK. No other part of whet imports this folder."""
