"""The certificate of the admission webhook: the controller issues it, renews it, and has the API server trust it."""
