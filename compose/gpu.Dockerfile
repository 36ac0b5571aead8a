# k3mesh on a GPU host: docker build -f compose/gpu.Dockerfile -t k3mesh . (docs/gpu.md). CUDA comes with torch's wheels, the
# driver with the host. Not built in CI.
FROM python:3.12-slim-bookworm

RUN printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d && chmod +x /usr/sbin/policy-rc.d \
    && apt-get update && apt-get install -y --no-install-recommends redis-server redis-tools libnuma1 gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /k3mesh
COPY . .
RUN pip install --no-cache-dir hatchling==1.28.0 editables \
    && pip install --no-cache-dir --no-build-isolation -e '.[services,gateway,cuda]' \
    && pip install --no-cache-dir --no-deps tokenspeed-kernel==0.1.4

# What DeepEP loads at import.
ENV LD_LIBRARY_PATH=/usr/local/lib/python3.12/site-packages/nvidia/nvshmem/lib:/usr/local/lib/python3.12/site-packages/nvidia/nccl/lib
ENTRYPOINT ["k3mesh"]
CMD ["--help"]
