// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/podlace/podlace/conf"
	"github.com/podlace/podlace/pkg/cli/chain"
	"github.com/podlace/podlace/pkg/cli/reconcile"
	"github.com/podlace/podlace/pkg/cli/sandbox"
	"github.com/podlace/podlace/pkg/store"
)

// cniBinDir is where runtimes search for plugins and 'make install' copies them.
const cniBinDir = "/opt/cni/bin"

// testPod is a new pod on which 'podlace trace' and 'podlace canary' run a chain of plugins. The process's own network namespace is the
// node.
type testPod struct {
	chain.Attachment
	chain *chain.Chain
	calls []chain.Call
	space *sandbox.Pod
	cache string
}

// openTestPod creates a pod's namespace without network, which remove deletes. With show, each call of a plugin is printed.
func openTestPod(plugins string, list *chain.List, show bool, stdout io.Writer) (*testPod, error) {
	cache, err := os.MkdirTemp("", "podlace-trace")
	if err != nil {
		return nil, err
	}
	p := &testPod{cache: cache}
	p.chain = chain.New(plugins, cache, list, func(c chain.Call) {
		if p.calls = append(p.calls, c); show {
			printCall(stdout, c)
		}
	})
	if p.space, err = sandbox.NewPod("podlace-trace-" + strings.ToLower(rand.Text()[:8])); err != nil {
		return nil, errors.Join(err, os.RemoveAll(cache))
	}
	p.Attachment = chain.Attachment{ContainerID: p.space.Name, Netns: p.space.Path, IfName: "eth0", PodNamespace: "podlace",
		PodName: p.space.Name}
	return p, nil
}

// remove runs DEL, also after a failed ADD, and deletes the namespace.
func (p *testPod) remove(ctx context.Context) error {
	ctx = context.WithoutCancel(ctx)
	err := p.chain.Del(ctx, p.Attachment)
	if err != nil {
		p.chain.DelEach(ctx, p.Attachment)
	}
	return errors.Join(err, p.space.Close(), os.RemoveAll(p.cache))
}

// logChanges makes the plugins write the debug log with the changes and phases.
func logChanges() error { return os.Setenv("PODLACE_LOG", "debug") }

// readConflist returns the network in the named file, or in the shipped configuration of this name.
func readConflist(name string) (*chain.List, error) {
	data, err := store.ReadFile(name)
	path := name
	if shipped, unknown := conf.Conflist(name); unknown == nil && errors.Is(err, fs.ErrNotExist) {
		path, data, err = "", shipped, nil
	}
	if err != nil {
		return nil, err
	}
	list, err := reconcile.Load(path, data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return list, nil
}

// findPlugins returns a folder with all named plugins: the given folder, or else that of podlace or /opt/cni/bin.
func findPlugins(dir string, names []string) (string, error) {
	dirs := []string{dir}
	if dir == "" {
		exe, err := os.Executable()
		if err != nil {
			return "", err
		}
		dirs = []string{filepath.Dir(exe), cniBinDir}
	}
	return pluginFolder(dirs, names)
}

// pluginFolder returns the first folder that contains all named plugins.
func pluginFolder(dirs, names []string) (string, error) {
	var errs []error
	for _, dir := range dirs {
		dir, err := filepath.Abs(dir)
		if err == nil {
			err = chain.CheckPlugins(dir, names)
		}
		if err == nil {
			return dir, nil
		}
		errs = append(errs, err)
	}
	return "", errors.Join(errs...)
}
