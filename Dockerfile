# SPDX-License-Identifier: Apache-2.0
# whet on CPUs: docker build -t whet . && docker run --rm whet --help       (docs/containers.md)
FROM python:3.11-slim-bookworm

# The sandbox; a compiler for two kernels; wget, with which KubeRay asks a Ray node for its health.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap g++ wget \
    && rm -rf /var/lib/apt/lists/*

ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
ARG EXTRAS=gymnasium,mcp,peft,ray,serve,tensorboard,video,wandb
WORKDIR /opt/whet
COPY constraints.txt ./
RUN pip install --no-cache-dir -c constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
COPY whet whet
RUN pip install --no-cache-dir -c constraints.txt ".[${EXTRAS}]"

# The owner of what a run writes; a mounted folder needs the same number.
ARG UID=1000
RUN useradd --create-home --uid "${UID}" whet && install --directory --owner=whet /work
USER ${UID}
WORKDIR /work
ENTRYPOINT ["whet"]
CMD ["--help"]
