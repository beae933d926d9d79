"""Messages of the kubelet's gRPC services, generated from the .proto files beside (`make generate`)."""
