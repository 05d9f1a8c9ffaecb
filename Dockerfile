# For CPUs: what `make setup` installs. Its steps are those of .ci/run; the image was not built where it was written.
#   docker build -t megatron-noloco .
#   docker run --rm megatron-noloco doctor
FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends make && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/megatron_noloco
COPY . .
RUN make setup
ENV PATH=/opt/megatron_noloco/.venv/bin:$PATH OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
ENTRYPOINT ["python", "-m", "megatron_noloco"]
CMD ["--help"]
