# The image that deploy/*.yaml run. Debian's glibc, since protobuf has no fast wheel for musl.
FROM python:3.13-slim-trixie AS build
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.13-slim-trixie AS installed
COPY --from=build /wheels /wheels
COPY constraints.txt /wheels/
# With --schedules, the controller reads cron lines, and asks vSphere in child processes, which alone load pyVmomi.
RUN pip install --no-cache-dir --constraint /wheels/constraints.txt "gpuvirt[schedules,vsphere] @ file://$(echo /wheels/*.whl)" \
  && rm -r /wheels
# The controller issues the webhook's certificate by openssl, which ca-certificates brings.
RUN openssl version
ENV PYTHONDONTWRITEBYTECODE=1
USER 0:0

# In the place of NVIDIA's vgpu-device-manager (docs/drop-in.md): docker build --target nvidia-k8s-vgpu-dm .
FROM installed AS nvidia-k8s-vgpu-dm
ENTRYPOINT ["nvidia-k8s-vgpu-dm"]

FROM installed AS gpuvirt
ENTRYPOINT ["gpuvirt"]
CMD ["node"]
