module github.com/podlace/podlace/integration/e2e/crio

go 1.26.0

replace (
	github.com/podlace/podlace => ../../..
	github.com/podlace/podlace/integration/e2e/containerd => ../containerd
)

require (
	github.com/podlace/podlace v0.0.0-00010101000000-000000000000
	github.com/podlace/podlace/integration/e2e/containerd v0.0.0-00010101000000-000000000000
	k8s.io/cri-api v0.37.0
)

require (
	github.com/google/go-cmp v0.7.0 // indirect
	github.com/google/nftables v0.3.0 // indirect
	github.com/mdlayher/netlink v1.11.2 // indirect
	github.com/mdlayher/socket v0.6.0 // indirect
	github.com/vishvananda/netlink v1.3.1 // indirect
	github.com/vishvananda/netns v0.0.5 // indirect
	golang.org/x/net v0.60.0 // indirect
	golang.org/x/sync v0.24.0 // indirect
	golang.org/x/sys v0.49.0 // indirect
	golang.org/x/text v0.42.0 // indirect
	google.golang.org/genproto/googleapis/rpc v0.0.0-20260817212433-ac3dfec99bb1 // indirect
	google.golang.org/grpc v1.85.0 // indirect
	google.golang.org/protobuf v1.36.12 // indirect
)
