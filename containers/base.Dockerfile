# The layer that every stage shares: Python, the locked dependencies, the product's own folders, a user without rights.
#   docker build -f containers/base.Dockerfile -t lazytrain-base .
#   TORCH_INDEX picks the build of torch: PyTorch's own CPU index for a machine without CUDA; empty is the default index.
ARG BASE_IMAGE=python:3.11.14-slim-bookworm

FROM ${BASE_IMAGE} AS build
ARG TORCH_INDEX=""
ARG EXTRAS=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /app
COPY pyproject.toml requirements.lock README.md LICENSE ./
COPY data_contracts data_contracts
COPY stages stages
COPY flows flows
RUN python -m venv /opt/venv \
 && /opt/venv/bin/pip install ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} "$(grep '^torch==' requirements.lock)" \
 && /opt/venv/bin/pip install --constraint requirements.lock --editable ".${EXTRAS:+[${EXTRAS}]}" \
 && /opt/venv/bin/python -m compileall -q data_contracts stages flows

FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title="lazytrain" org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin lazytrain
COPY --from=build /opt/venv /opt/venv
COPY --from=build /app /app
# hadolint ignore=DL3064
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 \
    TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 \
    MLFLOW_DISABLE_TELEMETRY=true DO_NOT_TRACK=1 RAY_USAGE_STATS_ENABLED=0
WORKDIR /app
USER 10001
