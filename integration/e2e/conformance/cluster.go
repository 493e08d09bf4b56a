// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// dnsAddresses are those of the DNS server on the control plane, which scripts/cluster.sh passes to the kubelets.
const dnsAddresses = "192.0.2.10:53,[2001:db8::10]:53"

// testCluster is what the e2e tests and the cluster of scripts/cluster.sh need: programs and images.
type testCluster struct {
	programs, kubernetes, containerd, reference, images string // folders
	image, archive                                      string // the name of Podlace's image, and the file that contains the image
}

// prepareCluster builds what programs and images the cache lacks. If the machine cannot run a cluster, it fails before any build.
func prepareCluster(ctx context.Context, cache string) (c testCluster, err error) {
	if _, err := lastLine(ctx, nil, "scripts/cluster.sh", "check"); err != nil {
		return c, err
	}
	for _, one := range []struct {
		to      *string
		command []string
	}{
		{&c.kubernetes, []string{"scripts/programs.sh", filepath.Join(cache, "programs"), "kubernetes"}},
		{&c.programs, []string{"scripts/programs.sh", filepath.Join(cache, "programs"), "e2e"}},
		{&c.containerd, []string{"scripts/programs.sh", filepath.Join(cache, "programs"), "containerd"}},
		{&c.images, []string{"scripts/e2e-images.sh", cache}},
	} {
		if *one.to, err = lastLine(ctx, nil, one.command...); err != nil {
			return c, err
		}
	}
	if c.archive, err = filepath.Abs("build/image.tar"); err != nil {
		return c, err
	}
	c.reference, err = filepath.Abs("build/reference")
	return c, err
}

// linkImages creates a folder with links to the test images and to Podlace's image.
func (c testCluster) linkImages(folder string) error {
	archives, err := filepath.Glob(filepath.Join(c.images, "*.tar"))
	if err != nil {
		return err
	}
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	for _, archive := range archives {
		if err := os.Symlink(archive, filepath.Join(folder, filepath.Base(archive))); err != nil {
			return err
		}
	}
	return os.Symlink(c.archive, filepath.Join(folder, "podlace.tar"))
}

// suiteFor returns the e2e test suite for a cluster that scripts/cluster.sh has started.
func (c testCluster) suiteFor(kubeconfig string, in ...string) testSuite {
	return testSuite{programs: c.programs, kubectl: filepath.Join(c.kubernetes, "kubectl"), kubeconfig: kubeconfig, in: in}
}

// lastLine runs a command and returns the last line of its output.
func lastLine(ctx context.Context, environment []string, command ...string) (string, error) {
	var out bytes.Buffer
	run := exec.CommandContext(ctx, command[0], command[1:]...) //nolint:gosec // scripts of this tree
	run.Env, run.Stdout, run.Stderr = environment, &out, os.Stderr
	if err := run.Run(); err != nil {
		return "", fmt.Errorf("%s: %w", strings.Join(command, " "), err)
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	return lines[len(lines)-1], nil
}

// startCluster starts a cluster with the plugins "podlace" or "reference", and returns its test suite and a function that ends it.
func (c testCluster) startCluster(ctx context.Context, folder, mode, plugins string, nodes int) (testSuite, func(), error) {
	at := filepath.Join(folder, "cluster")
	if err := c.linkImages(filepath.Join(at, "images")); err != nil {
		return testSuite{}, nil, fmt.Errorf("images of the cluster: %w", err)
	}
	r := runningCluster{testCluster: c, folder: at, environment: append(os.Environ(),
		"KUBERNETES="+c.kubernetes, "CONTAINERD="+filepath.Join(c.containerd, "containerd"), "PROXY="+mode, "NODES="+nodeNames(nodes))}
	if err := r.runScript(ctx, nil, "up"); err != nil {
		return testSuite{}, nil, err
	}
	names, err := r.startDNS(ctx)
	end := func() {
		names()
		if err := r.runScript(context.WithoutCancel(ctx), nil, "down"); err != nil {
			fmt.Fprintln(os.Stderr, "e2e:", err)
		}
	}
	if err == nil {
		err = r.setUpNetwork(ctx, plugins, nodes)
	}
	if err != nil {
		end()
		return testSuite{}, nil, err
	}
	s := c.suiteFor(filepath.Join(at, "plane/admin.kubeconfig"), "scripts/cluster.sh", "exec", at, "plane")
	s.environment = r.environment
	return s, end, nil
}

func nodeNames(count int) string {
	var names []string
	for i := range count {
		names = append(names, fmt.Sprint("node", i+1))
	}
	return strings.Join(names, " ")
}

// runningCluster is a cluster that scripts/cluster.sh has started.
type runningCluster struct {
	testCluster
	folder      string
	environment []string
}

// runScript runs a subcommand of scripts/cluster.sh, such as "up". An error contains its output.
func (r runningCluster) runScript(ctx context.Context, input []byte, verb string, args ...string) error {
	args = append([]string{verb, r.folder}, args...)
	command := exec.CommandContext(ctx, "scripts/cluster.sh", args...) //nolint:gosec // a script of this tree
	command.Env, command.Stdin = r.environment, bytes.NewReader(input)
	if out, err := command.CombinedOutput(); err != nil {
		return fmt.Errorf("scripts/cluster.sh %s: %w\n%s", verb, err, out)
	}
	return nil
}

// startDNS starts the DNS server on the control plane. The returned function stops it.
func (r runningCluster) startDNS(ctx context.Context) (stop func(), err error) {
	log, err := os.Create(filepath.Join(r.folder, "dns.log"))
	if err != nil {
		return func() {}, fmt.Errorf("log of the DNS server: %w", err)
	}
	command := exec.CommandContext(ctx, "scripts/cluster.sh", "exec", r.folder, "plane", //nolint:gosec // programs of this tree
		filepath.Join(r.programs, "dns"), "-kubeconfig", filepath.Join(r.folder, "plane/admin.kubeconfig"), "-listen", dnsAddresses)
	command.Env, command.Stdout, command.Stderr = r.environment, log, log
	if err := command.Start(); err != nil {
		return func() {}, fmt.Errorf("start the DNS server: %w", err)
	}
	return func() {
		_ = command.Process.Kill() // the process may have ended with the cluster
		_ = command.Wait()
		_ = log.Close()
	}, nil
}

// setUpNetwork installs the plugins and waits until the nodes are Ready.
func (r runningCluster) setUpNetwork(ctx context.Context, plugins string, nodes int) error {
	if plugins == "reference" {
		r.environment = append(r.environment, "PODLACE_BIN="+r.reference)
		if err := r.runScript(ctx, nil, "byhand"); err != nil {
			return err
		}
	} else if err := r.applyManifest(ctx); err != nil {
		return err
	}
	for name := range strings.FieldsSeq(nodeNames(nodes)) { // some specs require three zones
		if err := r.runScript(ctx, nil, "exec", "plane", "kubectl", "label", "node", name,
			"topology.kubernetes.io/zone=zone-of-"+name); err != nil {
			return err
		}
	}
	if plugins != "reference" {
		return nil
	}
	for name := range strings.FieldsSeq(nodeNames(nodes)) {
		cidrs, err := lastLine(ctx, r.environment, "scripts/cluster.sh", "exec", r.folder, "plane",
			"kubectl", "get", "node", name, "-o", "jsonpath={.spec.podCIDRs}")
		if err != nil {
			return err
		}
		list, err := referenceConflist(cidrs)
		if err != nil {
			return fmt.Errorf("podCIDRs of %s: %w", name, err)
		}
		if err := r.runScript(ctx, list, "exec", name, "sh", "-ec",
			"cat >/etc/cni/net.d/new && mv /etc/cni/net.d/new /etc/cni/net.d/10-podlace.conflist"); err != nil {
			return err
		}
	}
	return nil
}

// applyManifest applies Podlace's manifest with the component vxlan, whose tunnel connects the node behind the router to the others.
func (r runningCluster) applyManifest(ctx context.Context) error {
	manifest := filepath.Join(r.folder, "podlace.yaml")
	conf, err := filepath.Abs("conf/cluster")
	if err != nil {
		return err
	}
	if _, err := lastLine(ctx, nil, "go", "run", "-C", "scripts/image", ".", "manifest",
		"-conf", conf, "-image", r.image, "-component", "vxlan", "-out", manifest); err != nil {
		return err
	}
	for _, kubectl := range [][]string{{"apply", "-f", manifest}, {"wait", "--for=condition=Ready", "nodes", "--all", "--timeout=120s"}} {
		if err := r.runScript(ctx, nil, "exec", append([]string{"plane", "kubectl"}, kubectl...)...); err != nil {
			return err
		}
	}
	return nil
}

// referenceConflist returns a conflist of the reference plugins for a node with these podCIDRs, a JSON list.
func referenceConflist(podCIDRs string) ([]byte, error) {
	var cidrs []string
	if err := json.Unmarshal([]byte(podCIDRs), &cidrs); err != nil {
		return nil, fmt.Errorf("%q: %w", podCIDRs, err)
	}
	type object = map[string]any
	var ranges [][]object
	var routes []object
	for _, cidr := range cidrs {
		prefix, err := netip.ParsePrefix(cidr)
		if err != nil {
			return nil, fmt.Errorf("%q: %w", podCIDRs, err)
		}
		ranges = append(ranges, []object{{"subnet": cidr}})
		routes = append(routes, object{"dst": map[bool]string{true: "0.0.0.0/0", false: "::/0"}[prefix.Addr().Is4()]})
	}
	return json.Marshal(object{"cniVersion": "1.0.0", "name": "reference", "plugins": []object{
		{
			"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": false, "hairpinMode": true,
			"ipam": object{"type": "host-local", "ranges": ranges, "routes": routes},
		},
		{"type": "portmap", "capabilities": object{"portMappings": true}, "snat": true},
		{"type": "bandwidth", "capabilities": object{"bandwidth": true}},
	}})
}
