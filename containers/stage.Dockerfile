# One stage's image: a shared base, what else this stage needs, and which stage it runs.
# The request is mounted; the result is one line on standard output, the exit code says how it ended.
#   docker run --rm --read-only --tmpfs /tmp -v STORE:/store -v request.json:/request.json:ro lazytrain-score
# A command, not an entry point: a worker that starts containers replaces it.
ARG BASE=localhost/lazytrain-base:0.1.0
# hadolint ignore=DL3006
FROM ${BASE}
# Packages of others, such as methods that are found by their entry points; within the product's own lock.
ARG EXTRAS=""
USER 0
# hadolint ignore=SC2086
RUN [ -z "${EXTRAS}" ] || uv pip install --quiet --no-cache --compile-bytecode --constraint requirements.lock ${EXTRAS}
USER 10001
ARG STAGE
ARG COMMIT=unknown
ENV LAZYTRAIN_STAGE=${STAGE}
RUN python -c "import sys; from stages.stage import find_stage; find_stage(sys.argv[1])" "${LAZYTRAIN_STAGE}"
LABEL org.opencontainers.image.revision="${COMMIT}" lazytrain.stage="${STAGE}"
CMD ["sh", "-c", "exec python -m stages \"$LAZYTRAIN_STAGE\" /request.json"]
