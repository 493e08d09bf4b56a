// SPDX-License-Identifier: Apache-2.0

// Package poolfile reads the configuration file of the device plugin, and what the selection of devices needs to know of the node, for the
// commands that only look at them.
package poolfile

import (
	"fmt"
	"regexp"

	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/store"
)

// The following constants are the default values of the flags that AddFlags adds.
const (
	Default       = "/etc/pcidp/config.json"
	DefaultPrefix = "intel.com"
)

// AddFlags adds the flags that select the file.
func AddFlags(add func(to *string, flag, value, usage string), s *pool.Source, host string) {
	add(&s.File, "config-file", Default, "configuration of the device plugin")
	add(&s.Prefix, "resource-prefix", DefaultPrefix, "prefix of resources that have no resourcePrefix")
	add(&s.Host, "node-name", host, "name of this node in the configuration")
}

// hostForm matches the names of hosts and of Node objects.
var hostForm = regexp.MustCompile(`^[[:alnum:]]([\w.-]*[[:alnum:]])?$`)

// Read reads and parses the file.
func Read(s pool.Source) (*pool.Config, error) {
	if !hostForm.MatchString(s.Host) {
		return nil, fmt.Errorf("--node-name %q: want the name of a Node object: 'kubectl get nodes' lists them", s.Host)
	}
	data, err := store.ReadFile(s.File)
	if err == nil {
		var config *pool.Config
		if config, err = pool.Parse(s, data); err == nil {
			return config, nil
		}
	}
	return nil, fmt.Errorf("read the configuration of the device plugin (--config-file): %w", err)
}

// Env returns what the kernel knows about the node.
func Env() (env pool.Env, err error) {
	host, err := kernel.Host()
	if err != nil {
		return env, err
	}
	defer host.Close()
	env.DefaultRoute, err = host.Uplinks()
	return env, err
}
