// CRI-O and crictl of the versions that the tests run, built by scripts/crio.sh; there is no source here.
module github.com/podlace/podlace/integration/e2e/programs/crio

go 1.26.3

require (
	github.com/cri-o/cri-o v1.36.1
	sigs.k8s.io/cri-tools v1.36.0
)

// CRI-O itself asks for v0.36.0-rc.0, which no proxy serves in full. v0.36.2 and later do not fit: KeyValue.Value of cri-api became bytes.
replace (
	k8s.io/api => k8s.io/api v0.36.1
	k8s.io/apimachinery => k8s.io/apimachinery v0.36.1
	k8s.io/client-go => k8s.io/client-go v0.36.1
	k8s.io/component-base => k8s.io/component-base v0.36.1
	k8s.io/cri-api => k8s.io/cri-api v0.36.1
	k8s.io/cri-client => k8s.io/cri-client v0.36.1
	k8s.io/cri-streaming => k8s.io/cri-streaming v0.36.1
	k8s.io/kubelet => k8s.io/kubelet v0.36.1
	k8s.io/streaming => k8s.io/streaming v0.36.1
)
