// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"sigs.k8s.io/yaml"

	"github.com/podlace/podlace/pkg/daemon/claimcheck"
)

// printedClasses returns the classes that 'sriov-device-plugin classes' prints for a configuration, which it writes into dir.
func printedClasses(dir, config string) (out classList, err error) {
	file := filepath.Join(dir, "config.json")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		return nil, err
	}
	var stdout, stderr bytes.Buffer
	args := []string{"classes", "--config-file", file, "--resource-prefix", "example.com"}
	if status, _ := claimcheck.Run(args, nil, &stdout, &stderr); status != 0 {
		return nil, errors.New(stderr.String())
	}
	for _, text := range splitDocuments(stdout.String()) {
		class := &resourceapi.DeviceClass{}
		if err := yaml.UnmarshalStrict([]byte(text), class); err != nil {
			return nil, fmt.Errorf("%w in %s", err, text)
		}
		out = append(out, class)
	}
	return out, nil
}

var documentEnd = regexp.MustCompile(`(?m)^---$`)

// splitDocuments splits a YAML file with several documents.
func splitDocuments(text string) (out []string) {
	for _, d := range documentEnd.Split(text, -1) {
		if strings.TrimSpace(d) != "" {
			out = append(out, d)
		}
	}
	return out
}

// className returns the name of the class that 'sriov-device-plugin classes' prints for a resource.
func className(resource string) string {
	prefix, name, _ := strings.Cut(resource, "/")
	return name + "." + prefix
}
