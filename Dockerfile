# The image that deploy/*.yaml run. Debian's glibc, since protobuf has no fast wheel for musl.
# A tag: tests reach no registry, so nothing would notice a wrong digest, and an old one lacks Debian's fixes.
# To build on a digest: --build-arg PYTHON_IMAGE=python:3.13-slim-trixie@sha256:... (docs/install.md)
ARG PYTHON_IMAGE=python:3.13-slim-trixie
FROM ${PYTHON_IMAGE} AS build
# libvirt-python has no wheels: it is built for the libvirt of this Debian.
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends gcc libc6-dev libvirt-dev pkg-config
WORKDIR /src
COPY constraints.txt .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels --constraint constraints.txt libvirt-python
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . ./schedules
RUN gcc -O2 -o /memory-limit deploy/memory-limit/memory-limit.c

FROM ${PYTHON_IMAGE} AS installed
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends libvirt0 && rm -r /var/lib/apt/lists
COPY --from=build /wheels /wheels
COPY constraints.txt /wheels/
# With --schedules, the controller reads cron lines, and asks vSphere and libvirt in child processes, which alone load
# their libraries.
RUN pip install --no-cache-dir --constraint /wheels/constraints.txt --find-links /wheels \
  "gpuvirt-schedules[libvirt,vsphere] @ file://$(echo /wheels/gpuvirt_schedules-*.whl)" \
  && rm -r /wheels
# The agent copies it to nodes whose shares NVIDIA's driver limits (docs/sharing.md).
COPY --from=build /memory-limit /usr/local/lib/gpuvirt/memory-limit
ENV PYTHONDONTWRITEBYTECODE=1
USER 0:0

# In the place of NVIDIA's vgpu-device-manager (docs/drop-in.md): docker build --target nvidia-k8s-vgpu-dm .
FROM installed AS nvidia-k8s-vgpu-dm
ENTRYPOINT ["nvidia-k8s-vgpu-dm"]

FROM installed AS gpuvirt
ENTRYPOINT ["gpuvirt"]
CMD ["node"]
