# What every stage's image shares: Python, one layer of locked dependencies, then the product's own few files.
# Sources come last, so that a change to one builds again in seconds. `containers/build.py` gives the arguments.
#   --target base    what `python -m stages` needs
#   --target flows   also Prefect, `flows` and the `lazytrain` command: what a Prefect worker starts
ARG BASE_IMAGE=python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d

# The dependencies alone, so that another change of pyproject.toml leaves the large layer as it is.
# hadolint ignore=DL3006
FROM ${BASE_IMAGE} AS needed
WORKDIR /needed
COPY pyproject.toml ./
RUN python3 -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
all = project['dependencies']; prefect = [item for item in all if item.startswith('prefect')]; \
print(*(item for item in all if item not in prefect), sep='\n', file=open('needed.txt', 'w')); \
print(*prefect, *project['optional-dependencies']['team'], sep='\n', file=open('team.txt', 'w'))" \
 && touch --date=@0 needed.txt team.txt

# hadolint ignore=DL3006
FROM ${BASE_IMAGE} AS dependencies
RUN useradd --uid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin lazytrain
WORKDIR /app
COPY requirements.lock ./
COPY --from=needed /needed/needed.txt ./
# Which build of torch uv looks for: cpu, or empty for what the package index has, on PyPI the CUDA build.
ARG TORCH_BACKEND=cpu
# Nothing can be compiled later, where the root is read-only: byte code is made here. Tests of others are 10% of the size.
ENV PATH=/opt/venv/bin:$PATH VIRTUAL_ENV=/opt/venv
RUN python3 -m venv /opt/venv && pip install --no-cache-dir --quiet uv==0.13.9 \
 && uv pip install --quiet --no-cache --constraint requirements.lock -r needed.txt \
      ${TORCH_BACKEND:+--torch-backend "${TORCH_BACKEND}"} \
 && find /opt/venv/lib -type d \( -name tests -o -path '*/torch/test' \) -prune -exec rm -rf {} + \
 && { python -m compileall -qq -j 0 /opt/venv/lib || true; } \
 && echo /app > "$(python -c 'import site; print(site.getsitepackages()[0])')/lazytrain.pth"
# A root that may be read-only and a user of any number: all that is written goes below /tmp.
# hadolint ignore=DL3064
ENV HOME=/tmp USER=lazytrain \
    PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 \
    TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 \
    MLFLOW_DISABLE_TELEMETRY=true DO_NOT_TRACK=1 \
    RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=disabled RAY_TRAIN_ENABLE_PREEMPTION_WATCHER=0 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

# buildah tells a cached step by its text, and by the values of arguments only for RUN: those of a label stand before one.
FROM dependencies AS base
COPY data_contracts data_contracts
COPY stages stages
ARG DEVICE=cpu
ARG COMMIT=unknown
RUN chmod -R a+rX /app && python -m compileall -q /app
LABEL org.opencontainers.image.title="lazytrain" org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${COMMIT}" lazytrain.device="${DEVICE}"
USER 10001

FROM dependencies AS prefect
COPY --from=needed /needed/team.txt ./
RUN uv pip install --quiet --no-cache --compile-bytecode --constraint requirements.lock -r team.txt
ENV PREFECT_SERVER_ANALYTICS_ENABLED=false PREFECT_TELEMETRY_ENABLE_RESOURCE_METRICS=false

FROM prefect AS flows
COPY pyproject.toml README.md LICENSE ./
COPY data_contracts data_contracts
COPY stages stages
COPY flows flows
ARG DEVICE=cpu
ARG COMMIT=unknown
RUN chmod -R a+rX /app && python -m compileall -q /app \
 && uv pip install --quiet --no-cache --no-deps --no-build-isolation --editable . \
 && install --directory --owner 10001 --group 10001 /data /prefect /artifacts
# A fresh volume mounted on one of these belongs to who owns the folder in the image: infra/compose.yaml.
LABEL org.opencontainers.image.title="lazytrain" org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${COMMIT}" lazytrain.device="${DEVICE}"
USER 10001
