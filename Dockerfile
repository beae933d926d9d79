# The image that deploy/*.yaml run. Debian's glibc, since protobuf has no fast wheel for musl.
FROM python:3.13-slim-bookworm AS build
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.13-slim-bookworm
COPY --from=build /wheels /wheels
COPY constraints.txt /wheels/
RUN pip install --no-cache-dir --constraint /wheels/constraints.txt /wheels/*.whl && rm -r /wheels
ENV PYTHONDONTWRITEBYTECODE=1
USER 0:0
ENTRYPOINT ["gpuvirt"]
CMD ["node"]
