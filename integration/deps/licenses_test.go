// SPDX-License-Identifier: Apache-2.0

package deps

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// permittedLicenses maps each permitted license to a phrase of its text. A program under Apache-2.0 may link code under these.
func permittedLicenses() map[string]string {
	return map[string]string{
		"Apache-2.0": "apache license version 2.0",
		"MIT":        "permission is hereby granted, free of charge",
		"BSD":        "redistribution and use in source and binary forms",
		"ISC":        "distribute this software for any purpose with or without fee is hereby granted",
	}
}

func copyleftWords() *regexp.Regexp {
	return regexp.MustCompile(`general public license|mozilla public license|eclipse public license|business source license|server side public`)
}

// licenseIn returns the permitted license of a text, or "".
func licenseIn(text string) string {
	text = strings.Join(strings.Fields(strings.ToLower(strings.ReplaceAll(text, "#", " "))), " ")
	if copyleftWords().MatchString(text) {
		return ""
	}
	for name, words := range permittedLicenses() { // one match is enough
		if strings.Contains(text, words) {
			return name
		}
	}
	return ""
}

func TestLicense(t *testing.T) {
	for text, want := range map[string]string{"GNU GENERAL PUBLIC LICENSE\nVersion 3": "", "": "", "Mozilla Public License, version 2.0": "",
		"                Apache License\n        Version 2.0, January 2004": "Apache-2.0", "# MIT License\nPermission is hereby granted, free of\ncharge": "MIT",
		"Permission is hereby granted, free of charge, but for the GNU Lesser General Public License": ""} {
		if got := licenseIn(text); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}

// TestLicenses checks all modules that are compiled into a program or a test.
func TestLicenses(t *testing.T) {
	makefile, err := os.ReadFile("../../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	match := regexp.MustCompile(`(?m)^MODULES := ((?:.*\\\n)*.*)$`).FindSubmatch(makefile)
	if match == nil {
		t.Fatal("the Makefile has no MODULES")
	}
	count := map[string]int{}
	for folder := range strings.FieldsSeq(". " + strings.ReplaceAll(string(match[1]), "\\\n", " ")) {
		cmd := goTool("list", "-deps", "-test", "-f", "{{with .Module}}{{if not .Main}}{{.Path}} {{.Dir}}{{end}}{{end}}", "./...")
		cmd.Dir = filepath.Join(cmd.Dir, folder)
		var refused bytes.Buffer
		cmd.Stderr = &refused
		out, err := cmd.Output()
		if err != nil { // the module cache may be empty, for example for another user
			t.Logf("SKIPPED: %s: its modules are not in the module cache: %v: %.300s", folder, err, refused.String())
			continue
		}
		lines := strings.Split(strings.TrimSpace(string(out)), "\n")
		slices.Sort(lines)
		for _, line := range slices.Compact(lines) {
			if module, dir, ok := strings.Cut(line, " "); ok && !strings.HasPrefix(module+"/", "github.com/podlace/podlace/") {
				name, why := licenseOf(dir)
				if why != nil {
					t.Errorf("%s needs %s: %v: remove the module from %s/go.mod, or add its license to permittedLicenses", folder, module, why, folder)
				}
				count[name]++
			}
		}
	}
	t.Logf("figures: modules by license: %v", count)
	if len(count) < 3 {
		t.Skip("SKIPPED: no module can be listed on this machine")
	}
}

func licenseOf(dir string) (name string, err error) {
	var paths []string
	for _, pattern := range []string{"LICENSE*", "LICENCE*", "License*", "COPYING*"} {
		found, err := filepath.Glob(filepath.Join(dir, pattern))
		if err != nil {
			return "", err
		}
		paths = append(paths, found...)
	}
	if len(paths) == 0 {
		return "", fmt.Errorf("no license in %s", dir)
	}
	text, err := os.ReadFile(paths[0])
	if err != nil {
		return "", err
	}
	if name = licenseIn(string(text)); name == "" {
		return "", fmt.Errorf("%s is not a known license that is compatible with Apache-2.0, it begins with %q", paths[0], fmt.Sprintf("%.200s", text))
	}
	return name, nil
}
