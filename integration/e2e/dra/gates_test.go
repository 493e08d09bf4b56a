// SPDX-License-Identifier: Apache-2.0

package dra_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// hasGate reports whether a feature gate is on, in GATES or by default of the Kubernetes version.
func hasGate(name string) bool {
	for gate := range strings.SplitSeq(os.Getenv("GATES"), ",") {
		if value, ok := strings.CutPrefix(gate, name+"="); ok {
			return value == "true"
		}
	}
	late := []string{"DRADeviceTaints", "DRADeviceTaintRules", "ResourceHealthStatus", "DRAExtendedResource", "DRAPartitionableDevices",
		"DRAConsumableCapacity", "DRAResourceClaimGranularStatusAuthorization"}
	never := []string{"GenericWorkload", "DRAWorkloadResourceClaims"} // off by default
	return !slices.Contains(never, name) && (os.Getenv("VERSION") != "1.34" || !slices.Contains(late, name))
}

// needGate skips the test if a feature gate of the cluster is off.
func needGate(t *testing.T, name string) {
	t.Helper()
	if !hasGate(name) {
		t.Skip("SKIP: the cluster is without", name)
	}
}

// gateOff disables feature gates of the API server until the test ends.
func (l *lab) gateOff(gates string) {
	l.Helper()
	file := filepath.Join(os.Getenv(dirEnv), "plane", "services", "apiserver")
	before, err := os.ReadFile(file)
	if err != nil {
		l.Fatal(err)
	}
	l.restartAPI(file, strings.TrimRight(string(before), "\n")+" '--feature-gates="+gates+"'\n")
	l.Cleanup(func() { l.restartAPI(file, string(before)) })
}

// restartAPI restarts the API server with another command line, and waits until the new process answers.
func (l *lab) restartAPI(file, command string) {
	l.Helper()
	if err := errors.Join(os.WriteFile(file+".new", []byte(command), 0o755), os.Rename(file+".new", file)); err != nil {
		l.Fatal(err)
	}
	if out, err := inPlane("sh", "-c", "kill -KILL $(cat /run/node/apiserver.pid)"); err != nil {
		l.Fatal(err, out)
	}
	l.apiReady()
}

// apiReady waits until the API server answers and the node is Ready.
func (l *lab) apiReady() {
	l.Helper()
	took := within(l.T, "the API server is ready", func() error {
		return l.client.CoreV1().RESTClient().Get().AbsPath("/readyz").Do(l.background()).Error()
	})
	l.Logf("the API server is ready after %.1f s", took.Seconds())
	if err := becomeReady(); err != nil {
		l.Fatal(err)
	}
}
