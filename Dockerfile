# The image of every node: Ray, PyTorch and Longshore, of the versions in constraints.txt.
#
#   docker build -t registry.example.com/longshore:0.1.0-cu130 .
#   docker build -t registry.example.com/longshore:0.1.0-cpu --build-arg TORCH=cpu .
#
# TORCH   the build of PyTorch: cpu, cu130... from its own index; pypi: what PyPI has. CUDA and NCCL come in PyTorch's
#         wheels; only the driver is the machine's, so both variants stand on the same small base.
# PYTHON  the base image; give it by digest for builds that repeat bit for bit.
# EXTRAS  what of pyproject.toml is installed.
ARG PYTHON=python:3.11.14-slim-bookworm

# hadolint ignore=DL3006
FROM ${PYTHON} AS build
ARG TORCH=cu130
ARG EXTRAS=serving,signing,tracing
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/longshore/bin:$PATH
WORKDIR /src
RUN python -m venv /opt/longshore
COPY constraints.txt ./
RUN grep '^torch==' constraints.txt > torch.txt \
 && if [ "$TORCH" = pypi ]; then pip install --requirement torch.txt; \
    else pip install --no-deps --index-url "https://download.pytorch.org/whl/$TORCH" --requirement torch.txt; fi
# what is needed, before the code that changes more often: an empty package of the same name needs the same
COPY pyproject.toml README.md LICENSE ./
RUN pip install --constraint constraints.txt ".[$EXTRAS]"
COPY . .
RUN pip install --constraint constraints.txt --no-deps --force-reinstall . && pip check

# hadolint ignore=DL3006
FROM ${PYTHON}
ARG TORCH=cu130
LABEL org.opencontainers.image.title="longshore" \
      org.opencontainers.image.licenses="Apache-2.0" \
      longshore.torch="$TORCH"
# wget: KubeRay's readiness probe of a service's workers. rsync: `ray up` copies files into the container. ssh: Ray's
# autoscaler, in the head's container, sets up the machines that it starts.
# Debian keeps only the newest of each version, so a version here would end the build, not fix it.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends openssh-client rsync wget \
 && rm -rf /var/lib/apt/lists/* \
 && groupadd --gid 1000 ray \
 && useradd --uid 1000 --gid 1000 --create-home --shell /bin/bash ray \
 && echo "export PATH=/opt/longshore/bin:\$PATH" > /etc/profile.d/longshore.sh
COPY --from=build /opt/longshore /opt/longshore
# Login shells (Ray's launcher) take PATH from the profile, and HOME is looked up in the image. Which GPUs are visible is
# not said here: on Kubernetes a pod that asked for none would have them all. Google's device plugin mounts the driver at
# /usr/local/nvidia and leaves it to the image to look there; NVIDIA's toolkit makes it known by itself.
ENV PATH=/opt/longshore/bin:$PATH:/usr/local/nvidia/bin \
    LD_LIBRARY_PATH=/usr/local/nvidia/lib64 \
    HOME=/home/ray \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000:1000
WORKDIR /home/ray
RUN longshore --help > /dev/null && python -c 'import actors, cluster, ray, storage, torch'
CMD ["longshore", "--help"]
