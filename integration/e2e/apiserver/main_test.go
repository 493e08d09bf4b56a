// SPDX-License-Identifier: Apache-2.0

// Package apiserver runs podlace-node processes against a real etcd and kube-apiserver. No kubelet and no controller runs, so the tests
// create the Node objects. `make apiserver` runs all tests except the measurements with thousands of nodes. `make scale` measures an agent
// among thousands of nodes.
//
//	KUBERNETES    folder of etcd and kube-apiserver
package apiserver

import (
	"flag"
	"os"
	"testing"

	"github.com/podlace/podlace/integration/harness"
)

func TestMain(m *testing.M) {
	flag.Parse()
	harness.Main(m)
}

// needAPI skips a test unless the variable KUBERNETES is the path of a folder that contains etcd and kube-apiserver.
func needAPI(t *testing.T) {
	t.Helper()
	if os.Getenv("KUBERNETES") == "" {
		t.Skip("SKIPPED, no API server: KUBERNETES is not set; make apiserver builds what is needed and sets it")
	}
	harness.Need(t, "podlace-node", "bridge", "host-local", "portmap", "bandwidth")
	for _, name := range []string{"ip", "sysctl", "unshare", "nsenter", "mount"} {
		harness.Program(t, name)
	}
}
