// SPDX-License-Identifier: Apache-2.0

// Package poolfile reads the configuration file of the device plugin and the devices of the node for the commands that only look at them.
package poolfile

import (
	"fmt"
	"os"
	"regexp"

	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/store"
)

// Default values of the flags that AddFlags adds.
const (
	Default       = "/etc/pcidp/config.json"
	DefaultPrefix = "intel.com"
)

// AddFlags adds the flags that select the file and, unless the entries of all hosts are read, the node, with its default name.
func AddFlags(add func(to *string, flag, value, usage string), s *pool.Source, host string) {
	add(&s.File, "config-file", Default, "configuration of the device plugin")
	add(&s.Prefix, "resource-prefix", DefaultPrefix, "prefix of resources that have no resourcePrefix")
	if !s.AllHosts {
		add(&s.Host, "node-name", host, "name of this node in the configuration")
	}
}

// hostForm matches the names of hosts and of Node objects.
var hostForm = regexp.MustCompile(`^[[:alnum:]]([\w.-]*[[:alnum:]])?$`)

// Read reads and parses the file.
func Read(s pool.Source) (*pool.Config, error) {
	if !s.AllHosts && !hostForm.MatchString(s.Host) {
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

// Scan returns the devices of the node, and what else their selection needs to know.
func Scan(sysfs string) (s *pci.Snapshot, env pool.Env, err error) {
	if _, err = os.Stat(sysfs); err != nil {
		return nil, env, fmt.Errorf("--sysfs: %v: want the folder where sysfs is mounted, such as /sys", err) //nolint:errorlint // no lack of PCI
	}
	if s, err = pci.Scan(sysfs); err != nil {
		return nil, env, err
	}
	host, err := kernel.Host()
	if err != nil {
		return nil, env, err
	}
	defer host.Close()
	if env.DefaultRoute, err = host.Uplinks(); err == nil {
		env.InUse, err = host.InUse()
	}
	return s, env, err
}
