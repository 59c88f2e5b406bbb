# One stage's image: the base, and which stage it runs. The request is mounted; the result goes to standard output.
#   docker build -f containers/stage.Dockerfile --build-arg STAGE=score -t lazytrain-score .
#   docker run --rm --read-only --tmpfs /tmp -v "$PWD/request.json:/request.json:ro" lazytrain-score
# A command, not an entry point: a worker that starts containers may replace it.
ARG BASE=lazytrain-base:0.1.0
# hadolint ignore=DL3006
FROM ${BASE}
ARG STAGE
ARG COMMIT=unknown
ENV LAZYTRAIN_STAGE=${STAGE}
LABEL org.opencontainers.image.revision="${COMMIT}" lazytrain.stage="${STAGE}"
RUN python -c "import sys; from stages.stage import find_stage; find_stage(sys.argv[1])" "${LAZYTRAIN_STAGE}"
CMD ["sh", "-c", "exec python -m stages \"$LAZYTRAIN_STAGE\" /request.json"]
