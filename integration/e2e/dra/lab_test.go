// SPDX-License-Identifier: Apache-2.0

package dra_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/podlace/podlace/integration/pcitest"
)

const (
	resource = "example.com/fast"
	slow     = "example.com/slow"
	variable = "PCIDEVICE_EXAMPLE_COM_FAST"
)

// "fast", the default of the tests, offers all VFs by DRA.
const fast = `{"resourceList": [
	{"resourceName": "fast", "resourcePrefix": "example.com", "api": "dra", "selectors": {"vendors": ["8086"]}}]}`

// ofResource contains the selectors of a DeviceClass for the VFs of the resource example.com/fast.
const ofResource = `[{cel: {expression:
  'device.driver == "sriov.podlace.io" && device.attributes["sriov.podlace.io"].resource == "` + resource + `"'}}]`

// setup is the configuration and the cards of a test's node, for most tests the zero value.
type setup struct {
	config  string          // configuration of the daemon; "" means fast
	machine pcitest.Machine // nil: two NUMA nodes with one PF of four VFs each
}

// lab is a node with its own cards, daemon and Kubernetes namespace, for one test.
type lab struct {
	*testing.T
	*daemon
	config  *rest.Config // clients of an administrator
	client  kubernetes.Interface
	objects dynamic.Interface
	ns      string
	sysfs   string
	ids     []string         // PCI addresses of the VFs, sorted
	before  map[string]iface // interfaces of the VFs, by PCI address
	audit   int64            // size of the audit log when the test began
	isPod   bool             // a DaemonSet runs the daemon
	last    []func()         // cleanups that run after the end of all pods
}

// newLab starts the daemon, and waits until the daemon is ready and its slices are published.
func newLab(t *testing.T, s setup) *lab {
	t.Helper()
	l := prepare(t, s)
	l.run()
	l.ready()
	l.published()
	return l
}

// prepare creates a test's cards and Kubernetes namespace without starting the daemon.
func prepare(t *testing.T, s setup) *lab {
	t.Helper()
	if reason := os.Getenv(skipEnv); reason != "" {
		t.Skip("SKIP, no cluster:", reason)
	}
	begin := time.Now()
	if s.machine.PFs == 0 {
		s.machine = pcitest.Machine{Nodes: 2, PFs: 1, VFs: 4}
	}
	l := &lab{T: t, sysfs: pcitest.Generate(t, s.machine), ns: namespaceOf(t.Name())}
	l.connect()
	if info, err := os.Stat(auditLog(os.Getenv(dirEnv))); err == nil {
		l.audit = info.Size()
	}
	l.ids = addInterfaces(t, l.sysfs)
	l.before = atHome(t, l.sysfs)
	showCards(t, l.sysfs)
	l.daemon = newDaemon(t, l.sysfs, cmp.Or(s.config, fast))
	t.Cleanup(func() { t.Logf("took %.1f s, load %s", time.Since(begin).Seconds(), load()) })
	t.Cleanup(l.clear)
	l.makeNamespace()
	return l
}

// connect creates Kubernetes clients with an administrator's rights.
func (l *lab) connect() {
	l.Helper()
	config, err := adminConfig()
	if err != nil {
		l.Fatal(err)
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		l.Fatal(err)
	}
	objects, err := dynamic.NewForConfig(config)
	if err != nil {
		l.Fatal(err)
	}
	l.config, l.client, l.objects = config, client, objects
}

// namespaceOf returns the name of the test's Kubernetes namespace.
func namespaceOf(test string) string {
	return strings.ToLower(strings.NewReplacer("/", "-", "_", "-", " ", "-").Replace(test))
}

// makeNamespace creates the test's Kubernetes namespace, and waits until pods can be created in this namespace.
func (l *lab) makeNamespace() {
	l.Helper()
	ns := &core.Namespace{ObjectMeta: metav1.ObjectMeta{Name: l.ns, Labels: map[string]string{
		"resource.kubernetes.io/admin-access": "true"}}}
	if _, err := l.client.CoreV1().Namespaces().Create(l.Context(), ns, metav1.CreateOptions{}); err != nil {
		l.Fatal(err)
	}
	within(l.T, "the namespace has its ServiceAccount", func() error {
		_, err := l.client.CoreV1().ServiceAccounts(l.ns).Get(l.Context(), "default", metav1.GetOptions{})
		return err
	})
	l.create("{kind: DeviceClass, metadata: {name: " + l.class() + "}, spec: {selectors: " + ofResource + "}}")
}

// class returns the name of the test's DeviceClass, which selects the VFs of the resource example.com/fast.
func (l *lab) class() string { return l.ns + "-fast" }

// clear deletes the test's Kubernetes objects. All VFs must return to the node.
func (l *lab) clear() {
	ctx := context.Background()
	if l.cmd == nil && !l.isPod {
		l.run()
	}
	if l.Failed() {
		l.describe()
	}
	defer func() {
		for _, f := range l.last {
			f()
		}
	}()
	now := int64(0)
	left := func() error {
		pods, err := l.client.CoreV1().Pods(l.ns).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, p := range pods.Items {
			if p.DeletionTimestamp == nil {
				err = errors.Join(err, l.client.CoreV1().Pods(l.ns).Delete(ctx, p.Name, metav1.DeleteOptions{}))
			}
		}
		if len(pods.Items) > 0 {
			return errors.Join(err, fmt.Errorf("pod %s remains", pods.Items[0].Name))
		}
		return errors.Join(l.noRecords(), l.allHome())
	}
	if err := try(left); err != nil {
		l.Errorf("not within %s: all VFs are home: %v", patience, err)
		l.describe()
		_ = l.client.CoreV1().Pods(l.ns).DeleteCollection(ctx, metav1.DeleteOptions{GracePeriodSeconds: &now}, metav1.ListOptions{})
		_ = l.client.ResourceV1().ResourceClaims(l.ns).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{})
	}
	_ = l.client.CoreV1().Namespaces().Delete(ctx, l.ns, metav1.DeleteOptions{})
	_ = l.client.ResourceV1().DeviceClasses().Delete(ctx, l.class(), metav1.DeleteOptions{})
}

// noRecords returns an error while the record of a prepared claim exists.
func (l *lab) noRecords() error {
	if left, _ := filepath.Glob(claimRecords + "/*"); len(left) > 0 {
		return fmt.Errorf("records of claims remain: %v", left)
	}
	return nil
}

// try repeats a check until it succeeds or the time is up.
func try(check func() error) (err error) {
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if err = check(); err == nil {
			return nil
		}
	}
	return err
}

// within repeats a check until it succeeds, and returns how long it took. The time limit fails the test.
func within(t *testing.T, what string, check func() error) time.Duration {
	t.Helper()
	begin := time.Now()
	if err := try(check); err != nil {
		t.Fatalf("not within %s: %s: %v", patience, what, err)
	}
	return time.Since(begin)
}

// remains repeats a check for 4 seconds, each of which must succeed.
func remains(t *testing.T, what string, check func() error) {
	t.Helper()
	for end := time.Now().Add(4 * time.Second); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
		if err := check(); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	}
}
